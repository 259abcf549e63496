"""Write a model in another form: flattened, in half precision, as a transformers checkpoint, as an ONNX graph."""
