"""A DCGAN of 128 pixels with an optimizer for each of its two networks, as in
https://github.com/pytorch/examples/tree/main/dcgan, on torchvision's FakeData."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=64, help="input batch size")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--nz", type=int, default=100, help="size of the latent z vector")
parser.add_argument("--ngf", type=int, default=128)
parser.add_argument("--ndf", type=int, default=128)
parser.add_argument("--lr", type=float, default=0.0002)
parser.add_argument("--workers", type=int, default=2)
opt = parser.parse_args()

torch.manual_seed(1)
device = torch.device("cuda")
to_signed = transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
dataset = datasets.FakeData(
    size=opt.batch * opt.steps,
    image_size=(3, 128, 128),
    transform=transforms.Compose([transforms.ToTensor(), to_signed]),
)
dataloader = DataLoader(dataset, opt.batch, shuffle=True, num_workers=opt.workers)


def up(inputs, outputs, stride=2, padding=1):
    return [
        nn.ConvTranspose2d(inputs, outputs, 4, stride, padding, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(True),
    ]


def down(inputs, outputs):
    return [
        nn.Conv2d(inputs, outputs, 4, 2, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.LeakyReLU(0.2, inplace=True),
    ]


class Generator(nn.Module):
    def __init__(self, nz, ngf):
        super().__init__()
        self.main = nn.Sequential(
            *up(nz, ngf * 16, 1, 0),  # 4 x 4
            *up(ngf * 16, ngf * 8),
            *up(ngf * 8, ngf * 4),
            *up(ngf * 4, ngf * 2),
            *up(ngf * 2, ngf),  # 64 x 64
            nn.ConvTranspose2d(ngf, 3, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self, ndf):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(3, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            *down(ndf, ndf * 2),
            *down(ndf * 2, ndf * 4),
            *down(ndf * 4, ndf * 8),
            *down(ndf * 8, ndf * 16),  # 4 x 4
            nn.Conv2d(ndf * 16, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, images):
        return self.main(images).view(-1)


def weights_init(module):
    name = module.__class__.__name__
    if "Conv" in name:
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif "BatchNorm" in name:
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


net_g = Generator(opt.nz, opt.ngf).to(device).apply(weights_init)
net_d = Discriminator(opt.ndf).to(device).apply(weights_init)
criterion = nn.BCELoss()
optimizer_d = torch.optim.Adam(net_d.parameters(), lr=opt.lr, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(net_g.parameters(), lr=opt.lr, betas=(0.5, 0.999))

for i, (images, _) in enumerate(dataloader):
    # The discriminator: first with real images, then with fakes
    net_d.zero_grad()
    real = images.to(device)
    count = real.size(0)
    label = torch.full((count,), 1.0, device=device)
    output = net_d(real)
    loss_real = criterion(output, label)
    loss_real.backward()
    d_x = output.mean().item()

    noise = torch.randn(count, opt.nz, 1, 1, device=device)
    fake = net_g(noise)
    label.fill_(0.0)
    output = net_d(fake.detach())
    loss_fake = criterion(output, label)
    loss_fake.backward()
    loss_d = loss_real + loss_fake
    optimizer_d.step()

    # The generator: its fakes are to pass for real
    net_g.zero_grad()
    label.fill_(1.0)
    output = net_d(fake)
    loss_g = criterion(output, label)
    loss_g.backward()
    d_g_z = output.mean().item()
    optimizer_g.step()
    print(
        f"[{i}/{len(dataloader)}] Loss_D: {loss_d.item():.4f} Loss_G: {loss_g.item():.4f} "
        f"D(x): {d_x:.4f} D(G(z)): {d_g_z:.4f}"
    )
