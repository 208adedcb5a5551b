"""xkv's core storage: keys, fragments, cards, rings, the gateway and its client; no vLLM, no torch.

Importing this package starts no thread, opens no file and touches no device.
"""

__version__ = "0.1.0"
