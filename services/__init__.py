"""The services of Antiphon, and the plumbing they share. Services never import one another."""

import os
import sys
import warnings

if "grpc" in sys.modules and os.environ.get("GRPC_ENABLE_FORK_SUPPORT") != "0":
    warnings.warn("grpc was imported before services: child processes may crash; import services first", stacklevel=2)

# gRPC's C core reads both when it is first imported, and every module of ours is imported after this one.
# With its fork support on (the default) it starts threads between fork and exec of a child: of 200 children of a
# process with calls under way, 55 died of SIGSEGV or SIGABRT (grpcio 1.85). Our children never use its state.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
# It writes lines of its own to standard error (each GOAWAY of a peer that stops); what matters is an error of a call.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
