"""How to be a service: configuration, logs, errors, server, client, bus, worker.

Knows gRPC and NATS, and no reinforcement learning.
"""
