"""What tests share: fakes, an injected clock, polling and the leak check."""
