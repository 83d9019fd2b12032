"""The side of Lightning's Trainer: precision, batches, requirements, reports, and making the model parallel."""
