"""The recommenders for their tests: their modules."""

from __future__ import annotations

from tests.examples.modules import ExampleModules
from tests.examples.scripts import ROOT

EXAMPLE = ROOT / "examples" / "recommenders"
_MODULES = ExampleModules(EXAMPLE, EXAMPLE.with_name("wide_and_deep"))
example_module = _MODULES.module
only_this_example = _MODULES.alone
