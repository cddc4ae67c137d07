"""Tests of the folder names of tables."""

from urllib.parse import unquote

import pytest

from fleet import fleet
from fleet.errors import ConfigError
from fleet.ps.table.folder_name import folder_name
from fleet.ps.table.layout import SparseTableConfig

NAMES = [
    "ads",
    "a b",
    "user.0",
    "a/b",
    "a%2Fb",
    ".",
    "..",
    "buffers.pt",
    "trainer.pt",
    "a.pt2",
    "transforms.json",
    "dense.12",
    "\u8868",
]


def test_names_have_folders_of_their_own():
    """A reader gets the name back, and no folder is a file of a save or the folder of a dense table."""
    folders = [folder_name(name) for name in NAMES]
    assert [unquote(folder) for folder in folders] == NAMES
    assert not any(folder.endswith((".pt", ".pt2", ".json")) or "/" in folder for folder in folders)
    assert folder_name("dense.12") != folder_name("dense.12", dense=True) == "dense.12"


@pytest.mark.parametrize("name", ["", "a" * 256, "\u8868" * 29, "\ud800", 5])
def test_a_name_without_a_folder_is_refused_when_it_is_given(name):
    with pytest.raises(ConfigError, match=r"text that the name of a folder can be made from, of at most 255 bytes"):
        SparseTableConfig(name, 2)
    SparseTableConfig("a" * 255, 2)
    with pytest.raises(ConfigError):
        fleet.SparseEmbedding(2, name="a" * 256)
