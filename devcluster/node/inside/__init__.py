"""What runs in the new process between the agent's fork and the container's program.

A fresh interpreter without site-packages imports only this package, the standard library and nothing
of the agent, because each container and each exec probe pays for the imports.
"""
