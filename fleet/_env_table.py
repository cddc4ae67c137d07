"""Every environment variable the project reads or hands to a process it starts, with its meaning.

``owner`` says who sets it: ``user``, ``launcher`` (Fleet's contract of worker and server processes), ``torch``
(torch's contract, kept beside Fleet's), ``scheduler`` (Slurm, MPI, Kubernetes operators).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, who sets it, its default and what it means."""

    name: str
    owner: str
    default: str | int | float | None
    meaning: str


def _table(*rows: tuple[str, str, str | int | float | None, str]) -> dict[str, Variable]:
    return {name: Variable(name, owner, default, meaning) for name, owner, default, meaning in rows}


VARIABLES: dict[str, Variable] = _table(
    # Who am I: Fleet's contract.
    ("PADDLE_TRAINER_ID", "launcher", 0, "rank of this worker in the job"),
    ("PADDLE_TRAINERS_NUM", "launcher", 1, "number of workers in the job"),
    ("PADDLE_TRAINER_ENDPOINTS", "launcher", None, "ip:port of every worker, comma separated, in rank order"),
    ("PADDLE_CURRENT_ENDPOINT", "launcher", None, "ip:port of this worker"),
    ("PADDLE_RANK_IN_NODE", "launcher", 0, "rank of this worker on its node"),
    ("PADDLE_LOCAL_RANK", "launcher", 0, "the same, newer name"),
    ("PADDLE_LOCAL_SIZE", "launcher", 1, "number of workers on this node"),
    ("PADDLE_GLOBAL_RANK", "launcher", 0, "rank of this worker in the job, newer name"),
    ("PADDLE_GLOBAL_SIZE", "launcher", 1, "number of workers in the job, newer name"),
    ("PADDLE_NNODES", "launcher", None, "number of nodes, N or MIN:MAX"),
    ("PADDLE_MASTER", "launcher", None, "ip:port where the workers meet"),
    ("PADDLE_LOCAL_DEVICE_IDS", "launcher", None, "device ids of this worker"),
    ("PADDLE_WORLD_DEVICE_IDS", "launcher", None, "device ids of every worker"),
    ("PADDLE_DISTRI_BACKEND", "launcher", None, "process-group backend: gloo or nccl"),
    ("PADDLE_BACKUP_ENV_PATH", "launcher", None, "JSON file that holds variables too long for the environment"),
    ("PADDLE_LOG_DIR", "launcher", "log", "folder of the log files"),
    ("PADDLE_JOB_ID", "user", "default", "name that keeps jobs apart"),
    ("POD_NAME", "launcher", None, "name of the pod (node) in logs"),
    ("FLAGS_selected_gpus", "launcher", None, "device index of this worker"),
    ("PADDLE_PG_TIMEOUT", "user", 1800000, "process-group timeout in milliseconds"),
    ("FLAGS_stop_check_timeout", "user", 900, "seconds to wait for the peers at start"),
    # Parameter-server roles.
    ("TRAINING_ROLE", "launcher", None, "TRAINER, PSERVER, HETER_TRAINER or COORDINATOR"),
    ("PADDLE_TRAINING_ROLE", "launcher", None, "the same, older name"),
    ("PADDLE_ROLE", "launcher", None, "the same, newer name"),
    ("PADDLE_PSERVERS_IP_PORT_LIST", "launcher", None, "ip:port of every server; absent: not a PS job"),
    ("POD_IP", "launcher", None, "address of this node"),
    ("PADDLE_PORT", "launcher", None, "port of this server (or first port of this node)"),
    ("PADDLE_TRAINERS", "scheduler", None, "hosts of the workers"),
    ("PADDLE_WITH_GLOO", "launcher", 0, "0 off, 1 workers, 2 workers and servers"),
    ("PADDLE_GLOO_RENDEZVOUS", "launcher", 3, "1 HDFS, 2 file, 3 HTTP"),
    ("PADDLE_GLOO_FS_PATH", "launcher", None, "folder of the file rendezvous"),
    ("PADDLE_GLOO_HTTP_ENDPOINT", "launcher", None, "ip:port of the HTTP rendezvous"),
    ("FLAGS_check_nan_inf", "user", 0, "1 names the module and rank where a NaN or Inf first appears, and stops"),
    ("FLAGS_pp_check_naninf", "user", 0, "the same; Fleet's flag for pipelines"),
    ("CPU_NUM", "user", 1, "batches that half-async training sums up for one push"),
    ("FLEET_PS_DEADLINE", "user", 120, "seconds a parameter server may be away before a worker gives up"),
    ("FLEET_PS_LEASE", "user", 60, "seconds a worker may be silent before a parameter server stops waiting for it"),
    ("FLEET_PS_FOLDER", "user", None, "folder where parameter servers keep what a restarted one needs"),
    ("FLAGS_communicator_max_merge_var_num", "user", None, "wins over a_sync_configs['max_merge_var_num']"),
    ("FLAGS_communicator_send_queue_size", "user", None, "wins over a_sync_configs['send_queue_size']"),
    ("FLAGS_communicator_send_wait_times", "user", None, "wins over a_sync_configs['send_wait_times']"),
    ("FLAGS_communicator_thread_pool_size", "user", None, "wins over a_sync_configs['thread_pool_size']"),
    (
        "FLAGS_communicator_min_send_grad_num_before_recv",
        "user",
        None,
        "wins over a_sync_configs['min_send_grad_num_before_recv']",
    ),
    ("FLAGS_communicator_independent_recv_thread", "user", None, "wins over a_sync_configs['independent_recv_thread']"),
    # torch's contract.
    ("RANK", "torch", 0, "rank of this process in the job"),
    ("WORLD_SIZE", "torch", 1, "number of processes in the job"),
    ("LOCAL_RANK", "torch", 0, "rank of this process on its node"),
    ("LOCAL_WORLD_SIZE", "torch", 1, "number of processes on this node"),
    ("GROUP_RANK", "torch", 0, "rank of this node"),
    ("MASTER_ADDR", "torch", None, "address of the process-group store"),
    ("MASTER_PORT", "torch", None, "port of the process-group store"),
    ("TORCHELASTIC_RESTART_COUNT", "torch", 0, "how often the group was restarted"),
    ("TORCHELASTIC_RUN_ID", "torch", None, "id of the job under torchrun"),
    ("TORCHELASTIC_USE_AGENT_STORE", "torch", None, "True when the launcher already serves the store"),
    ("CUDA_VISIBLE_DEVICES", "user", None, "devices that this process may see"),
    ("OMP_NUM_THREADS", "user", None, "CPU threads of each process"),
    # Other starters.
    ("SLURM_PROCID", "scheduler", None, "rank under srun"),
    ("SLURM_NTASKS", "scheduler", None, "number of processes under srun"),
    ("SLURM_LOCALID", "scheduler", None, "rank on the node under srun"),
    ("SLURM_STEP_NODELIST", "scheduler", None, "nodes of the srun step"),
    ("SLURM_JOB_ID", "scheduler", None, "Slurm job number"),
    ("SLURM_STEP_TASKS_PER_NODE", "scheduler", None, "processes on each node under srun"),
    ("OMPI_COMM_WORLD_RANK", "scheduler", None, "rank under Open MPI's mpirun"),
    ("OMPI_COMM_WORLD_SIZE", "scheduler", None, "number of processes under Open MPI"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "scheduler", None, "rank on the node under Open MPI"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "scheduler", None, "processes on the node under Open MPI"),
    ("PMI_RANK", "scheduler", None, "rank under MPICH or Intel MPI"),
    ("PMI_SIZE", "scheduler", None, "number of processes under MPICH or Intel MPI"),
    ("MPI_LOCALRANKID", "scheduler", None, "rank on the node under Intel MPI"),
    # The launcher's own: twins of its flags (the command line wins over them) and its switches.
    ("PADDLE_RANK", "user", None, "rank of this node; twin of --rank"),
    ("PADDLE_LOG_LEVEL", "user", None, "twin of --log_level"),
    ("PADDLE_LOG_OVERWRITE", "user", None, "twin of --log_overwrite"),
    ("PADDLE_SORT_IP", "user", None, "twin of --sort_ip"),
    ("PADDLE_NPROC_PER_NODE", "user", None, "twin of --nproc_per_node"),
    ("PADDLE_RUN_MODE", "user", None, "twin of --run_mode"),
    ("PADDLE_DEVICES", "user", None, "twin of --devices"),
    ("PADDLE_IPS", "user", None, "twin of --ips"),
    ("PADDLE_START_PORT", "user", None, "twin of --start_port"),
    ("PADDLE_SERVER_NUM", "user", None, "twin of --server_num"),
    ("PADDLE_TRAINER_NUM", "user", None, "twin of --trainer_num"),
    ("PADDLE_SERVERS_ENDPOINTS", "user", None, "twin of --servers"),
    ("PADDLE_TRAINERS_ENDPOINTS", "user", None, "twin of --trainers"),
    ("PADDLE_GLOO_PORT", "user", None, "twin of --gloo_port"),
    ("PADDLE_MAX_RESTART", "user", None, "twin of --max_restart"),
    ("PADDLE_ELASTIC_LEVEL", "user", None, "twin of --elastic_level"),
    ("PADDLE_AUTO_PARALLEL_CONFIG", "user", None, "twin of --auto_parallel_config, which has no effect"),
    ("PADDLE_AUTO_CLUSTER", "launcher", None, "twin of --auto_cluster_config, which has no effect"),
    ("PADDLE_CLUSTER_TOPO_PATH", "user", None, "refused: rank mapping is not part of this project"),
    ("PADDLE_RANK_MAPPING_PATH", "user", None, "refused: rank mapping is not part of this project"),
    ("PADDLE_ENABLE_AUTO_MAPPING", "user", None, "refused: rank mapping is not part of this project"),
    ("PADDLE_ENV_LIMIT_LEN", "user", 48000, "longest value put into a worker's environment; longer goes to a file"),
    ("PORT_RANGE", "user", None, "first:last port the launcher takes free ports from"),
    ("FLAGS_START_PORT", "user", None, "first worker port of each node; the others follow it"),
    ("FLAGS_FIXED_PORT", "user", None, "the same, newer name"),
    ("DISTRIBUTED_TRAINER_ENDPOINTS", "scheduler", None, "ip:port of every worker; the hosts are the nodes"),
    # Elastic jobs.
    ("PADDLE_ELASTIC_SERVER", "scheduler", None, "etcd host:port; twin of --elastic_server"),
    ("PADDLE_ELASTIC_JOB_ID", "scheduler", None, "twin of --job_id"),
    ("PADDLE_ELASTIC_NP", "scheduler", None, "nodes of the job, N or MIN:MAX; twin of --np"),
    ("PADDLE_ELASTIC_SCALE", "user", None, "twin of --scale"),
    ("PADDLE_ELASTIC_FORCE", "user", None, "twin of --force"),
    ("PADDLE_ELASTIC_TIMEOUT", "scheduler", None, "seconds to wait for the peers; twin of --elastic_timeout"),
    ("PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL", "user", 1, "1: a failed node asks its scheduler for a restart (exit 101)"),
    ("PADDLE_ELASTIC_TTL", "user", 10, "seconds a node of an elastic job may be silent before the others go on"),
    ("FLEET_ETCD_USER", "user", None, "user name at etcd"),
    ("FLEET_ETCD_PASSWORD", "user", None, "password at etcd; not handed to the workers"),
    ("FLEET_ETCD_CA", "user", None, "file of the authority that signed etcd's certificate; turns TLS on"),
    ("FLEET_ETCD_CERT", "user", None, "file of this client's own certificate for etcd"),
    ("FLEET_ETCD_KEY", "user", None, "file of the key of that certificate"),
    ("PADDLE_ELASTIC_ETCD_SERVICE_HOST", "scheduler", None, "address of the etcd service in the cluster"),
    ("PADDLE_ELASTIC_ETCD_SERVICE_PORT", "scheduler", None, "port of the etcd service in the cluster"),
    # Fleet's own.
    ("FLEET_JOB_SECRET", "user", None, "key the processes of one job prove to each other; never logged"),
    ("FLEET_GENERATION", "launcher", 0, "number of this start of the job's workers; grows with each start"),
    ("FLEET_POD", "launcher", None, "random mark of the processes that one launcher started"),
    ("FLEET_FAULTS", "user", None, "for tests: where a worker fails on purpose, as in save.block:kill:rank=0:step=3"),
    # torchrun's defaults of its flags.
    ("PET_NNODES", "user", None, "twin of --nnodes"),
    ("PET_RDZV_ENDPOINT", "user", None, "twin of --master"),
    ("PET_RDZV_ID", "user", None, "twin of --job_id"),
    ("PET_RDZV_BACKEND", "user", None, "twin of --rdzv_backend"),
    ("PET_RDZV_CONF", "user", None, "refused: the meeting point has no such settings"),
    ("PET_NODE_RANK", "user", None, "twin of --rank"),
    ("PET_LOCAL_ADDR", "user", None, "twin of --host"),
    ("PET_STANDALONE", "user", None, "twin of --standalone"),
    ("PET_MASTER_ADDR", "user", None, "twin of --master_addr"),
    ("PET_MASTER_PORT", "user", None, "twin of --master_port"),
    ("PET_NPROC_PER_NODE", "user", None, "twin of --nproc_per_node"),
    ("PET_NO_PYTHON", "user", None, "twin of --no_python"),
    ("PET_LOG_DIR", "user", None, "twin of --log_dir"),
    ("PET_MAX_RESTARTS", "user", None, "twin of --max_restart"),
    ("PET_SHUTDOWN_TIMEOUT", "user", None, "twin of --shutdown_timeout"),
    ("PET_MONITOR_INTERVAL", "user", None, "twin of --monitor_interval, which has no effect"),
    ("PET_START_METHOD", "user", None, "twin of --start_method, which has no effect"),
    ("PET_ROLE", "user", None, "twin of --role, which has no effect"),
    ("PET_REDIRECTS", "user", None, "refused: every process has its own log file"),
    ("PET_TEE", "user", None, "refused: every process has its own log file"),
    ("PET_LOCAL_RANKS_FILTER", "user", None, "refused: every process has its own log file"),
    # Network interfaces and proxies.
    ("GLOO_SOCKET_IFNAME", "user", None, "network interface of gloo; the launcher sets the loopback one on one node"),
    ("http_proxy", "user", None, "not handed to the workers; kept as http_proxy_original"),
    ("https_proxy", "user", None, "not handed to the workers; kept as https_proxy_original"),
    # Who am I under other starters: the rest of what they say.
    ("GROUP_WORLD_SIZE", "torch", None, "number of nodes under torchrun"),
    ("KUBERNETES_SERVICE_HOST", "scheduler", None, "set in every Kubernetes pod"),
    ("SLURM_STEP_ID", "scheduler", None, "number of the srun step; absent in a batch shell"),
    ("SLURM_STEP_NUM_TASKS", "scheduler", None, "number of processes of the srun step"),
    ("SLURM_STEP_NUM_NODES", "scheduler", None, "number of nodes of the srun step"),
    ("SLURM_NODEID", "scheduler", None, "rank of the node under srun"),
    ("SLURM_JOB_NODELIST", "scheduler", None, "nodes of the Slurm job"),
    ("SLURM_JOB_NUM_NODES", "scheduler", None, "number of nodes of the Slurm job"),
    ("SLURM_NTASKS_PER_NODE", "scheduler", None, "processes asked for on each node of the Slurm job"),
    ("PMIX_NAMESPACE", "scheduler", None, "name of the job under Open MPI"),
    ("MPI_LOCALNRANKS", "scheduler", None, "processes on the node under MPICH or Intel MPI"),
    ("PADDLE_GLOO_HTTP_HOST", "launcher", None, "host of the HTTP rendezvous, older form"),
    ("PADDLE_GLOO_HTTP_PORT", "launcher", None, "port of the HTTP rendezvous, older form"),
    ("FLAGS_nccl_nrings", "user", 1, "1 to 8; kept as a value, has no effect"),
)
