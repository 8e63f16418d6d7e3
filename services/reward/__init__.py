"""The reward service: scores finished trajectories with named, versioned scorers, user code in killable children."""
