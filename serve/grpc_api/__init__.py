"""The gRPC services `aptjax.v1.AptServe` and `vllm.grpc.engine.VllmEngine`, health and reflection."""
