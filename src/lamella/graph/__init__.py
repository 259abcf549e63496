"""ONNX graphs of readers, made from their tensors with numpy alone: no torch, no transformers, no onnx."""
