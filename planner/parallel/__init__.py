"""Says which memory DDP, FSDP, DTensors and pipelines take on a device, and which ranks train together."""
