"""Looking at a program or a machine: nothing here takes part in training."""
