"""The gRPC server: the services `aptjax.v1.AptServe`, `vllm.grpc.engine.VllmEngine`, health and reflection."""
