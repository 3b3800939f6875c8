"""What is made of the samples of held-out prompts: estimators, answers, metrics. Pure numpy."""
