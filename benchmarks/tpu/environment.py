"""Environment variables for libtpu and JAX where there is no TPU. They must be in the environment before JAX is imported."""

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    # No TPU is looked for: neither the metadata server of Google's cloud is asked, nor is the lock of a process taken.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
