"""What the attention of a trained model does with a text: maps, half-lives and rotation rates."""
