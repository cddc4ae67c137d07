"""Parses and checks a PaddleJob document; errors are raised before anything is created from it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fleet.errors import ConfigError, UnknownOptionError, UnsupportedOptionError, did_you_mean

GROUP, VERSION, PLURAL, KIND = "batch.paddlepaddle.org", "v1", "paddlejobs", "PaddleJob"
API_VERSION = f"{GROUP}/{VERSION}"
PS, WORKER, HETER = "ps", "worker", "heter"
POD_IP, SERVICE, HOST = "PodIP", "Service", "Host"
ALWAYS, NEVER, ON_FAILURE, ON_COMPLETION = "Always", "Never", "OnFailure", "OnCompletion"
VOLCANO = "volcano"

# Whoever creates the pods sets these; a user's value in one process would contradict all others.
RESERVED = (
    "POD_IP", "PADDLE_TRAINER_ID", "TRAINING_ROLE", "PADDLE_TRAINING_ROLE", "PADDLE_PORT", "PADDLE_TRAINERS",
    "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ENDPOINTS", "PADDLE_PSERVERS_IP_PORT_LIST", "PADDLE_ELASTIC_JOB_ID",
    "PADDLE_ELASTIC_NP", "PADDLE_WITH_GLOO", "PADDLE_GLOO_HTTP_ENDPOINT",
)  # fmt: skip
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_LONGEST_LABEL = 63
_MAX_REPLICAS = 10000
_LONGEST_ADDRESS = len("255.255.255.255")
_VARIABLE_BYTES = 131072 - 100  # MAX_ARG_STRLEN of Linux holds name and value
_SPEC = ("cleanPodPolicy", "schedulingPolicy", "intranet", "withGloo", "elastic", PS, WORKER, HETER)
_RESTART = ("Always", "OnFailure", "Never")
_ROLE = ("replicas", "requests", "limits", "template")
_SCHEDULING = ("minAvailable", "queue", "priorityClass", "minResources")


@dataclass(frozen=True, kw_only=True)
class PodRole:
    """One role of the job: how many pods, the bounds of that number, and the template of each."""

    name: str
    replicas: int
    template: Mapping[str, Any]
    requests: int | None = None
    limits: int | None = None

    @property
    def pod_spec(self) -> Mapping[str, Any]:
        """The pod's specification as the user wrote it."""
        spec: Mapping[str, Any] = self.template["spec"]
        return spec


@dataclass(frozen=True, kw_only=True)
class PaddleJob:
    """A checked job; servers come first in ``roles``."""

    name: str
    namespace: str
    roles: tuple[PodRole, ...]
    clean_pod_policy: str | None = None
    intranet: str | None = None
    with_gloo: int = 0
    is_elastic: bool = False
    scheduling: Mapping[str, Any] | None = None
    uid: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def worker(self) -> PodRole:
        """The workers."""
        return next(role for role in self.roles if role.name == WORKER)

    @property
    def has_servers(self) -> bool:
        """Whether this is a parameter-server job."""
        return any(role.name == PS for role in self.roles)

    @property
    def mode(self) -> str:
        """PS, Collective or Single."""
        if self.has_servers:
            return "PS"
        return "Collective" if self.worker.replicas > 1 else "Single"

    @property
    def uses_volcano(self) -> bool:
        """Whether Volcano schedules the pods as a gang."""
        return self.scheduling is not None or any(r.pod_spec.get("schedulerName") == VOLCANO for r in self.roles)


def read_job(document: object) -> PaddleJob:
    """Returns the job that ``document`` (a PaddleJob parsed from YAML) describes.

    Raises:
        ConfigError: a field is missing, has a wrong value or contradicts another.
        UnknownOptionError: a field does not exist; names the nearest one.
        UnsupportedOptionError: the job asks for something that cannot be honoured; says why.

    Example:
        >>> pod = {"spec": {"containers": [{"name": "paddle", "image": "torch-fleet"}]}}
        >>> read_job({"apiVersion": "batch.paddlepaddle.org/v1", "kind": "PaddleJob", "metadata": {"name": "demo"},
        ...           "spec": {"worker": {"replicas": 2, "template": pod}}}).mode
        'Collective'
    """
    root = _mapping(document, "the document")
    kind = f"{root.get('apiVersion')} {root.get('kind')}"
    if kind != f"{API_VERSION} {KIND}":
        raise ConfigError(f"The document is a {kind!r}; it must be a {KIND} of {API_VERSION}.")
    metadata = _mapping(root.get("metadata"), "metadata")
    spec = _mapping(root.get("spec"), "spec")
    _known(spec, _SPEC, "spec")
    if spec.get(HETER) is not None:
        raise UnsupportedOptionError(
            "spec.heter is set: heterogeneous jobs of CPU and GPU workers are not supported. Omit it; the workers of a "
            "job with servers may use GPUs."
        )
    roles = tuple(_role(name, spec[name]) for name in (PS, WORKER) if spec.get(name) is not None)
    if not any(role.name == WORKER for role in roles):
        raise ConfigError("spec.worker is absent; a collective job has workers, a parameter-server job ps and worker.")
    job = PaddleJob(
        name=_name(metadata, roles),
        namespace=_namespace(metadata),
        roles=roles,
        clean_pod_policy=_choice(spec, "cleanPodPolicy", (ALWAYS, NEVER, ON_FAILURE, ON_COMPLETION)),
        intranet=_choice(spec, "intranet", (POD_IP, SERVICE, HOST)),
        with_gloo=_number(spec, "withGloo", (0, 1, 2)),
        is_elastic=_number(spec, "elastic", (0, 1)) == 1,
        scheduling=_scheduling(spec.get("schedulingPolicy")),
        uid=f"{metadata.get('uid') or ''}",
        labels=dict(_mapping(metadata.get("labels") or {}, "metadata.labels")),
    )
    _check_together(job)
    return job


def _check_together(job: PaddleJob) -> None:
    if job.with_gloo and not job.has_servers:
        raise ConfigError(f"spec.withGloo is {job.with_gloo} in a job without ps, where it has no meaning. Omit it.")
    if job.is_elastic and job.has_servers:
        raise UnsupportedOptionError(
            "spec.elastic is 1 in a job with ps: restarted servers have lost their parameters. Omit elastic, or "
            "omit ps."
        )
    _check_sizes(job)
    for role in job.roles:
        scheduler = role.pod_spec.get("schedulerName")
        if job.uses_volcano and scheduler not in (None, VOLCANO):
            raise ConfigError(
                f"spec.{role.name}.template.spec.schedulerName is {scheduler!r} and the job is scheduled by Volcano "
                "(schedulingPolicy, or another role's schedulerName). Use volcano for every role, or for none."
            )
        if job.intranet != HOST and role.pod_spec.get("hostNetwork"):
            raise ConfigError(
                f"spec.{role.name}.template.spec.hostNetwork is true and spec.intranet is "
                f"{job.intranet or POD_IP!r}. Write intranet: Host."
            )


def _check_sizes(job: PaddleJob) -> None:
    """Raises ConfigError where the number of pods breaks a limit: Volcano's minimum, names, the length of a list."""
    pods = sum(role.replicas for role in job.roles)
    least = (job.scheduling or {}).get("minAvailable", 1)
    if least > pods:
        raise ConfigError(
            f"spec.schedulingPolicy.minAvailable is {least} and the job has {pods} pods: Volcano would never start "
            f"them. Write at most {pods}, or omit it for all."
        )
    if job.intranet == SERVICE:
        check_service_name(job.name, "spec.intranet is Service")
    for role in job.roles:
        # An entry of the list is a host, a port of five digits and a comma. Services name their pods, and the last
        # index has the longest name. An elastic job has no such list, so its size has no such limit.
        longest = len(f"{job.name}-{role.name}-{role.replicas - 1}") if job.intranet == SERVICE else _LONGEST_ADDRESS
        if not job.is_elastic:
            check_list_size(role.name, role.replicas, role.replicas * (longest + len(":36000,")))


def check_service_name(name: str, reason: str) -> None:
    """Raises ConfigError where ``name`` cannot begin the name of a service, which must begin with a letter."""
    if not name[0].isalpha():
        raise ConfigError(
            f"metadata.name is {name!r} and {reason}: the pods get services, whose names begin with a letter. Choose "
            "such a name."
        )


def check_list_size(role: str, replicas: int, num_bytes: int) -> None:
    """Raises ConfigError where the addresses of a role do not fit in one environment variable."""
    if num_bytes >= _VARIABLE_BYTES:
        raise ConfigError(
            f"spec.{role}.replicas is {replicas}: the variable with all addresses has about {num_bytes} bytes, "
            f"and the limit is {_VARIABLE_BYTES}. Use fewer pods"
            + (" with more devices each, or a job with elastic: 1, which has no such list." if role == WORKER else ".")
        )


def _role(name: str, value: object) -> PodRole:
    role = _mapping(value, f"spec.{name}")
    _known(role, _ROLE, f"spec.{name}")
    replicas = _count(role, name, "replicas")
    if replicas is None:
        raise ConfigError(f"spec.{name}.replicas is absent; it is the number of pods, from 1.")
    requests = _count(role, name, "requests")
    limits = _count(role, name, "limits")
    if not (requests or 1) <= replicas <= (limits or _MAX_REPLICAS):
        raise ConfigError(
            f"spec.{name}.replicas is {replicas} with requests {requests} and limits {limits}; they are its bounds."
        )
    template = _mapping(role.get("template"), f"spec.{name}.template")
    where = f"spec.{name}.template.spec"
    pod = _mapping(template.get("spec"), where)
    containers = pod.get("containers")
    if not isinstance(containers, list) or not containers:
        raise ConfigError(f"{where}.containers is {containers!r}; it takes a list with at least one container.")
    for i, item in enumerate(containers):
        container = _mapping(item, f"{where}.containers[{i}]")
        for key in ("name", "image"):
            if not isinstance(container.get(key), str) or not container[key]:
                raise ConfigError(f"{where}.containers[{i}].{key} is {container.get(key)!r}; it takes a string.")
        _check_lists(container, f"{where}.containers[{i}]")
    # The first container runs the script and gets the job's variables; the others may use any names.
    _check_variables(containers[0], f"{where}.containers[0].env")
    _check_place(template, name)
    if pod.get("restartPolicy") not in (None, *_RESTART):
        raise ConfigError(f"{where}.restartPolicy is {pod['restartPolicy']!r}; it takes {', '.join(_RESTART)}.")
    return PodRole(name=name, replicas=replicas, requests=requests, limits=limits, template=template)


def _check_lists(container: Mapping[str, Any], where: str) -> None:
    """Checks the fields that are extended or read when pods are created from the template."""
    for key in ("env", "envFrom", "ports"):
        listed = container.get(key) or []
        if not isinstance(listed, list):
            raise ConfigError(f"{where}.{key} is {listed!r}; it takes a list.")
        for i, item in enumerate(listed):
            name = _mapping(item, f"{where}.{key}[{i}]").get("name")
            if key == "env" and (not isinstance(name, str) or not name):
                raise ConfigError(f"{where}.env[{i}].name is {name!r}; it takes the name of a variable.")
    resources = _mapping(container.get("resources") or {}, f"{where}.resources")
    _mapping(resources.get("limits") or {}, f"{where}.resources.limits")


def _check_place(template: Mapping[str, Any], name: str) -> None:
    """Checks what identifies a pod: its metadata, and the names that the job gives each pod."""
    where = f"spec.{name}.template"
    metadata = _mapping(template.get("metadata") or {}, f"{where}.metadata")
    for key in ("labels", "annotations"):
        _mapping(metadata.get(key) or {}, f"{where}.metadata.{key}")
    for key in ("hostname", "subdomain"):
        if template["spec"].get(key) is not None:
            raise ConfigError(
                f"{where}.spec.{key} is {template['spec'][key]!r}, and the job names each pod JOB-{name}-N. Leave it "
                "out."
            )


def _check_variables(container: Mapping[str, Any], where: str) -> None:
    for item in container.get("env") or []:
        if item["name"] in RESERVED:
            raise ConfigError(
                f"{where} sets {item['name']}, which the job sets for each pod. Omit it; spec.intranet selects "
                "the addresses of the pods, spec.withGloo the exchange of host arrays."
            )


def _name(metadata: Mapping[str, Any], roles: tuple[PodRole, ...]) -> str:
    name = metadata.get("name")
    if not isinstance(name, str) or not _LABEL.fullmatch(name):
        raise ConfigError(f"metadata.name is {name!r}; it takes lower-case letters, digits and '-', as in resnet.")
    # Pod names become host names; the last index has the longest.
    longest = max((f"{name}-{role.name}-{role.replicas - 1}" for role in roles), key=len)
    if len(longest) > _LONGEST_LABEL:
        raise ConfigError(
            f"metadata.name is {name!r}: the pod {longest!r} is longer than the {_LONGEST_LABEL} characters of a "
            "host name. Choose a shorter name."
        )
    return name


def is_label(text: object) -> bool:
    """Returns whether ``text`` can name a namespace or an object that becomes a host name."""
    return isinstance(text, str) and len(text) <= _LONGEST_LABEL and _LABEL.fullmatch(text) is not None


def _namespace(metadata: Mapping[str, Any]) -> str:
    name = metadata.get("namespace") or "default"
    if not is_label(name):
        raise ConfigError(f"metadata.namespace is {name!r}; it takes lower-case letters, digits and '-'.")
    return f"{name}"


def _scheduling(value: object) -> Mapping[str, Any] | None:
    if value is None:
        return None
    policy = _mapping(value, "spec.schedulingPolicy")
    _known(policy, _SCHEDULING, "spec.schedulingPolicy")
    least = policy.get("minAvailable", 1)
    if isinstance(least, bool) or not isinstance(least, int) or least < 1:
        raise ConfigError(f"spec.schedulingPolicy.minAvailable is {least!r}; it takes an integer from 1.")
    for key in ("queue", "priorityClass"):
        if not isinstance(policy.get(key, "x"), str):
            raise ConfigError(f"spec.schedulingPolicy.{key} is {policy[key]!r}; it takes a string.")
    _mapping(policy.get("minResources", {}), "spec.schedulingPolicy.minResources")
    return policy


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is {value!r}; it takes a mapping of names and values.")
    return value


def _known(mapping: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    for name in mapping:
        if name not in names:
            raise UnknownOptionError(
                f"{where}.{name} is not a field of a {KIND}.{did_you_mean(f'{name}', names)} It takes "
                f"{', '.join(names)}."
            )


def _choice(spec: Mapping[str, Any], name: str, allowed: tuple[str, ...]) -> str | None:
    value = spec.get(name)
    if value is None or value == "":
        return None
    if value not in allowed:
        near = did_you_mean(f"{value}", allowed)
        raise ConfigError(f"spec.{name} is {value!r}; it takes {', '.join(allowed)}.{near}")
    return f"{value}"


def _number(spec: Mapping[str, Any], name: str, allowed: tuple[int, ...]) -> int:
    value = spec.get(name)
    if value is None:
        return 0
    # True equals 1 in Python, and YAML's true is not a number that the field takes.
    if isinstance(value, bool) or value not in allowed:
        raise ConfigError(f"spec.{name} is {value!r}; it takes {', '.join(map(str, allowed))}.")
    return int(value)


def _count(role: Mapping[str, Any], role_name: str, name: str) -> int | None:
    value = role.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_REPLICAS:
        raise ConfigError(f"spec.{role_name}.{name} is {value!r}; it takes an integer from 1 to {_MAX_REPLICAS}.")
    return value
