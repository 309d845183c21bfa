"""What an inference server imports."""
