"""Nodes that run pods as processes of this machine: a kubelet for tests, without images and containers.

Start with `nodes.Nodes`; what it does and what it does not is in README.md. This file stays empty of
imports: every container that starts imports it.
"""
