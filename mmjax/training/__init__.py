"""The same models for trainers: log-probabilities of answers, with gradients."""
