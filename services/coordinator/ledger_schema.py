"""The tables of run.db (docs/design.md §8). What must never happen is a constraint here, not a habit of the callers."""

from __future__ import annotations

SCHEMA_VERSION = 3

SCHEMA = """
CREATE TABLE run (
    only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
    schema_version INTEGER NOT NULL,
    run_id TEXT NOT NULL,
    seed INTEGER NOT NULL,
    created_at REAL NOT NULL
) STRICT;

-- An admitted task input, as it was sent to the engines.
CREATE TABLE prompts (
    dataset TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    row INTEGER NOT NULL,
    token_ids BLOB NOT NULL,          -- antiphon.types.v1.TokenIds
    PRIMARY KEY (dataset, epoch, row)
) STRICT;

CREATE TABLE groups (
    group_id TEXT PRIMARY KEY,        -- dataset/epoch/row
    dataset TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    row INTEGER NOT NULL,
    admission INTEGER NOT NULL UNIQUE, -- position in the order of the run, from 0
    samples INTEGER NOT NULL CHECK (samples >= 1),
    state TEXT NOT NULL CHECK (state IN ('admitted', 'sampled', 'complete', 'failed', 'filtered')),
    FOREIGN KEY (dataset, epoch, row) REFERENCES prompts (dataset, epoch, row),
    UNIQUE (dataset, epoch, row)
) STRICT;

CREATE TABLE trajectories (
    trajectory_id TEXT PRIMARY KEY,   -- dataset/epoch/row/sample
    group_id TEXT NOT NULL REFERENCES groups (group_id),
    sample INTEGER NOT NULL CHECK (sample >= 0),
    oldest_version INTEGER NOT NULL,
    sampled_tokens INTEGER NOT NULL,
    message BLOB NOT NULL,            -- antiphon.types.v1.Trajectory
    UNIQUE (group_id, sample)
) STRICT;

-- A score or a failure, never both and never neither.
CREATE TABLE scores (
    trajectory_id TEXT PRIMARY KEY REFERENCES trajectories (trajectory_id),
    scorer TEXT NOT NULL,             -- name@version
    value REAL,
    failure TEXT,                     -- kind: reason
    message BLOB NOT NULL,            -- antiphon.reward.v1.ScoreResponse
    CHECK ((value IS NULL) <> (failure IS NULL))
) STRICT;

-- A Batch as it is sent: committed before TrainStep.
CREATE TABLE batches (
    step INTEGER PRIMARY KEY CHECK (step >= 1),
    digest BLOB NOT NULL CHECK (length(digest) = 32),
    header BLOB NOT NULL,             -- antiphon.learner.v1.StepHeader
    prompts_wanted INTEGER NOT NULL CHECK (prompts_wanted >= 1), -- prompts_per_step
    next_admission INTEGER NOT NULL CHECK (next_admission >= 1), -- every prompt before it was this Step's or earlier
    committed_at REAL NOT NULL
) STRICT;

-- Which trajectory entered which Step: one Step at most, by the primary key.
CREATE TABLE batch_rows (
    trajectory_id TEXT PRIMARY KEY REFERENCES trajectories (trajectory_id),
    step INTEGER NOT NULL REFERENCES batches (step),
    position INTEGER NOT NULL CHECK (position >= 0),
    message BLOB NOT NULL,            -- antiphon.learner.v1.TrainTrajectory
    UNIQUE (step, position)
) STRICT;

-- A Step that the learner applied.
CREATE TABLE steps (
    step INTEGER PRIMARY KEY REFERENCES batches (step),
    policy_version INTEGER NOT NULL UNIQUE,
    result BLOB NOT NULL,             -- antiphon.learner.v1.StepResult
    applied_at REAL NOT NULL
) STRICT;

-- A checkpoint that the learner has on disk, and that was not told to go.
CREATE TABLE checkpoints (
    step INTEGER PRIMARY KEY REFERENCES steps (step),
    path TEXT NOT NULL UNIQUE,
    digest BLOB NOT NULL CHECK (length(digest) = 32),
    bytes INTEGER NOT NULL,
    saved_at REAL NOT NULL
) STRICT;

-- How a policy did on a data set of held-out prompts, the first time that it was asked.
CREATE TABLE evaluations (
    dataset TEXT NOT NULL,
    policy_version INTEGER NOT NULL,
    score_mean REAL NOT NULL,
    PRIMARY KEY (dataset, policy_version)
) STRICT;

-- Transfer epochs that were begun: workers refuse those that are not above what they have seen.
CREATE TABLE epochs (
    epoch INTEGER PRIMARY KEY CHECK (epoch >= 1)
) STRICT;
"""
