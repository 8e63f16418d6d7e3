"""The learner: a thin parent that serves gRPC, and the ranks it supervises, which train one model by ZeRO-3."""
