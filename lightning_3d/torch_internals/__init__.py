"""Every private symbol of torch that this package uses, one small adapter each."""
