"""An emulated vLLM instance: OpenAI API, a real prefix cache, KV events over ZMQ, and switches to misbehave."""
