"""A resource of the machine is used up: disk, memory, GPU memory, file descriptors, threads."""

from leyden.doctor.messages import Kind, rule_of_messages

RULE = rule_of_messages(
    "resource-exhausted",
    Kind(
        pattern=r"no space left|disk is full|disk quota exceeded|StoreFull",
        cause="the disk is full",
        remedy="Free space, or move the run to a larger disk, then resume it. Old runs can go.",
        command="leyden runs --prune",
    ),
    Kind(
        pattern=r"too many open files|no file descriptors are left",
        cause="no file descriptors are left",
        remedy="Raise the limit (ulimit -n) or lower concurrency. An agent that opens a client in each rollout must "
        "close it.",
    ),
    Kind(
        pattern=r"(?:CUDA|HIP).{0,20}out of memory|torch.OutOfMemoryError|GPU memory is used up|no available memory for the cache"
        r"|free memory on device",
        cause="the GPU has too little memory",
        remedy="Lower max_tokens_per_microbatch or max_length, train with lora=LoRA(), dtype='bfloat16' or "
        "gradient_checkpointing=True, or give the model server less (gpu_memory_utilization).",
    ),
    Kind(
        pattern=r"\bMemoryError|cannot allocate memory|memory is used up|held more than memory_bytes|fit into memory"
        r"|can't allocate memory|unable to allocate",
        cause="memory is used up",
        remedy="Lower n_runners, concurrency or max_tokens_per_microbatch. memory_bytes= of the ipc and cs strategies "
        "limits each runner.",
    ),
    Kind(
        pattern=r"can't start new thread|no more threads or processes|resource temporarily unavailable|pthread_create",
        cause="no more threads or processes can be started",
        remedy="Raise the limit (ulimit -u; pids of a container), or lower the concurrency of agents that are not async.",
    ),
    Kind(
        pattern=r"takes no more connections|too many (?:clients|connections)",
        cause="the database takes no more connections",
        remedy="Raise max_connections of PostgreSQL, or use fewer processes.",
    ),
    explains=(
        "worker-died",
        "store-away",
        "run-killed",
        "server-does-not-start",
        "damaged-checkpoint",
        "upstream-refuses",
    ),
)
