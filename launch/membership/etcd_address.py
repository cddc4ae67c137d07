"""The address of etcd and the proofs of this job, read from the address and from variables; nothing is opened."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

from fleet.common.addresses import hide_user, split_list, split_master
from fleet.common.extras import install_line
from fleet.env import Environment
from fleet.errors import ConfigError

_FILES = {"ca": "FLEET_ETCD_CA", "certificate": "FLEET_ETCD_CERT", "key": "FLEET_ETCD_KEY"}


@dataclass(frozen=True, kw_only=True)
class EtcdAddress:
    """The endpoints of one etcd cluster, the user, and the files of TLS; with ``ca`` every connection is encrypted."""

    endpoints: tuple[str, ...]
    user: str = ""
    password: str = field(default="", repr=False)
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None

    @property
    def text(self) -> str:
        """The endpoints as messages name them, without the user."""
        return ",".join(self.endpoints)


def read_etcd_address(server: str, environment: Environment, source: str = "The address of etcd") -> EtcdAddress:
    """Returns the address that ``server`` (``ip:port``, ``user:password@ip:port,ip:port`` or ``etcd://ip:port``) names.

    FLEET_ETCD_USER and FLEET_ETCD_PASSWORD keep the password off the command line; FLEET_ETCD_CA turns TLS on, and
    FLEET_ETCD_CERT with FLEET_ETCD_KEY is this client's own certificate. ``source`` is how messages name the address.
    Raises ConfigError for a text that is no address, a file that is absent, and half of a pair.

    Example:
        >>> read_etcd_address("me:pw@10.0.0.1:2379", Environment({}))
        EtcdAddress(endpoints=('10.0.0.1:2379',), user='me', ca=None, certificate=None, key=None)
    """
    listed = split_master(server if "://" in server else f"etcd://{server}", source)[1]
    login, _, hosts = listed.rpartition("@")
    user, _, password = login.partition(":")
    user = environment.raw("FLEET_ETCD_USER") or unquote(user)
    password = environment.raw("FLEET_ETCD_PASSWORD") or unquote(password)
    if bool(user) != bool(password):
        raise ConfigError(
            f"The etcd server {hide_user(listed)} has {'a user' if user else 'a password'} only; it takes both. Set "
            "FLEET_ETCD_USER and FLEET_ETCD_PASSWORD."
        )
    files = {name: environment.raw(variable) for name, variable in _FILES.items()}
    for name, path in files.items():
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{_FILES[name]} is {path!r} in the environment; no such file exists.")
    if (files["certificate"] is None) != (files["key"] is None):
        raise ConfigError("FLEET_ETCD_CERT and FLEET_ETCD_KEY belong together, and one of them is absent. Set both.")
    if files["certificate"] is not None and files["ca"] is None:
        raise ConfigError(
            "FLEET_ETCD_CERT is set, but FLEET_ETCD_CA is not, so the server could not be checked. Set it to the file "
            "of the certificate authority."
        )
    return EtcdAddress(endpoints=tuple(split_list(hosts)), user=user, password=password, **files)


def check_etcd_client() -> None:
    """Raises ConfigError with the line that installs the etcd client when it is not here."""
    if find_spec("etcd3gw") is None:
        raise ConfigError(
            f"The job needs etcd, and the etcd client is not installed here. On every node, {install_line('elastic')}."
        )
