"""Options that steer something torch does not have or decides by itself: accepted, with one warning and the reason."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.strategies._declare.fields import Config, setting
from fleet.strategies._declare.strategy import top_level

_BUCKETS = "torch fills buckets by size; set fuse_grad_size_in_MB"
_STREAMS = "torch orders communication and computation with events"
_PROGRAM = "it steers a static program, and torch runs none"
_CUDNN = "torch has no such setting for cuDNN"


@top_level
@dataclass(frozen=True, kw_only=True)
class SettingsWithoutMeaning(Config):
    """Each is kept and can be read back; its reason is part of the warning."""

    mode: int = setting(
        1,
        "Kind of job: 1 collective, 2 parameter server, 3 pipeline, 4 heterogeneous.",
        enum={"COLLECTIVE": 1, "PS": 2, "PIPELINE": 3, "HETER": 4},
        no_meaning="fleet.init(is_collective=...) decides the kind of job",
    )
    elastic: bool = setting(
        False, "Let workers come and go.", no_meaning="the launcher does that; start the job with its elastic flags"
    )
    auto: bool = setting(
        False, "Turn on whatever fits.", no_meaning="nothing is turned on by guess; name the options you want"
    )
    fuse_grad_size_in_num: int = setting(8, "Gradients in a bucket.", at_least=1, no_meaning=_BUCKETS)
    fuse_grad_size_in_TFLOPS: float = setting(50.0, "Computation behind a bucket.", above=0, no_meaning=_BUCKETS)
    fuse_grad_merge: bool = setting(
        False, "Keep merged gradients in one buffer.", no_meaning="torch adds gradients up in their buckets already"
    )
    sync_nccl_allreduce: bool = setting(True, "Wait on the stream after each all-reduce.", no_meaning=_STREAMS)
    calc_comm_same_stream: bool = setting(False, "Communicate on the compute stream.", no_meaning=_STREAMS)
    nccl_comm_num: int = setting(
        1, "Communicators that take turns.", at_least=1, no_meaning="NCCL uses several channels by itself"
    )
    conv_workspace_size_limit: int = setting(
        512, "Memory in MB that a convolution may borrow.", at_least=0, no_meaning=_CUDNN
    )
    cudnn_batchnorm_spatial_persistent: bool = setting(False, "Use cuDNN's persistent batch norm.", no_meaning=_CUDNN)
    without_graph_optimization: bool = setting(True, "Run the program as it is written.", no_meaning=_PROGRAM)
    split_data: bool = setting(
        True,
        "Divide each batch among the workers.",
        no_meaning="the script divides the data, with torch.utils.data.DistributedSampler",
    )
