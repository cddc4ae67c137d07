"""The models, by the names that ``--model`` takes."""

from __future__ import annotations

from torch import nn

from models.dcn import DCN
from models.deepfm import DeepFM
from models.din import DIN
from models.dssm import DSSM
from models.esmm import ESMM
from models.mmoe import MMoE
from models.sasrec import SASRec
from models.word2vec import Word2Vec

MODELS: dict[str, type[nn.Module]] = {
    "deepfm": DeepFM,
    "dcn": DCN,
    "din": DIN,
    "esmm": ESMM,
    "mmoe": MMoE,
    "dssm": DSSM,
    "word2vec": Word2Vec,
    "sasrec": SASRec,
}
