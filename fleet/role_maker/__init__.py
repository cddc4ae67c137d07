"""Role makers: Fleet's objects that answer "who am I", over one immutable record of who started this process.

::

    RoleMakerBase
    |- PaddleCloudRoleMaker              reads the environment, at the first query
    `- UserDefinedRoleMaker              takes its arguments
       `- UserDefinedCollectiveRoleMaker its 1.x form

Every query exists under its 1.x name (``worker_num``) and with a leading underscore (``_worker_num``): Fleet's
scripts use both.
"""

from __future__ import annotations

from fleet.role_maker.makers import (
    GeneralRoleMaker,
    MPISymetricRoleMaker,
    PaddleCloudRoleMaker,
    RoleMakerBase,
    UserDefinedCollectiveRoleMaker,
    UserDefinedRoleMaker,
)
from fleet.role_maker.record import Role, RoleRecord

__all__ = [
    "GeneralRoleMaker",
    "MPISymetricRoleMaker",
    "PaddleCloudRoleMaker",
    "Role",
    "RoleMakerBase",
    "RoleRecord",
    "UserDefinedCollectiveRoleMaker",
    "UserDefinedRoleMaker",
]
