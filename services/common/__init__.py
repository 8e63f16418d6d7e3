"""How to be a service: configuration, logs, errors, server, client, bus. Knows gRPC and NATS, and no reinforcement learning."""
