"""Attribution: from features to the gram matrix, its damping, scores and rankings."""
