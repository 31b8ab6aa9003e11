"""Plans that run without torch.compile: modules checkpointed with `torch.utils.checkpoint`, some ops' results kept."""
