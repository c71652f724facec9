import torch

torch.use_deterministic_algorithms(True)
torch.set_num_threads(1)
