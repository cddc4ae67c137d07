"""The exchange of tokens for experts, under the path of ``paddle.distributed.utils.moe_utils``."""

from fleet.moe.token_exchange import global_gather as global_gather
from fleet.moe.token_exchange import global_scatter as global_scatter

__all__ = ["global_gather", "global_scatter"]
