"""EchoLoader: data echoing as a drop-in for torch.utils.data.DataLoader."""
