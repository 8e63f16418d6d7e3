"""The rollout service: samples trajectories from one engine and takes the policies it samples with."""
