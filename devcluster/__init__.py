"""A real Kubernetes control plane on this machine, and nodes that run pods as processes.

For development and tests, never for anything that matters, and no part of the weightsync package: it
may not import weightsync, nor weightsync it.
"""
