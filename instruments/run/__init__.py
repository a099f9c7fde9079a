"""What a run will cost, where its time goes, and how noisy its gradients are."""
