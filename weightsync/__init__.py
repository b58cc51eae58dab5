"""Ships the difference between two model checkpoints instead of the checkpoint.

The library turns a checkpoint and its parent into a small delta, publishes it to a store, and
rebuilds the checkpoint elsewhere bit for bit, verifying every byte it writes.

It must not know Kubernetes, pods or inference engines (the operator and the sidecar do), must
not need a GPU or torch, and must never leave a checkpoint that is neither the old nor the new.
"""

from importlib.metadata import version

__version__ = version("weightsync")
