"""The planner against tables of published runs: reading them, predicting each row, scoring."""
