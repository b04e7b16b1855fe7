"""ImageNet-1k in DeiT-small's shape (Qin et al. 2023, Table 8, IM): `--config=configs/deit_small.py:type2`.

The argument names a method of the paper's tables; see `sympow_jax.config.LRPE_METHODS`. `data.paths` is a folder with
one subfolder per class. Images are cropped at random and mirrored. This is a demonstration: without DeiT's RandAugment,
mixup, CutMix, random erasing, repeated augmentation, label smoothing, stochastic depth and averaged weights, expect
accuracies below those of Table 3.
"""

from sympow_jax import config

IMAGES, EPOCHS, WARMUP_EPOCHS, ROWS = 1_281_167, 300, 20, 1600


def get_config(method: str = "type2") -> config.Config:
    """Returns 12 layers of width 384 over patches of 16 pixels, trained for 300 epochs at 1,600 images per update."""
    patches = (224 // 16) ** 2
    return config.Config(
        model=config.ModelConfig(
            patch_size=16,
            layers=12,
            width=384,
            heads=6,
            attention=config.lrpe_method(method, length=patches, causal=False),
        ),
        task=config.TaskConfig(name="classification", classes=1000),
        data=config.DataConfig(
            source="images",
            paths=("data/imagenet/train",),
            heldout_paths=("data/imagenet/val",),
            image_size=224,
            context_length=patches,
            batch_tokens=ROWS * patches,
        ),
        optimizer=config.OptimizerConfig(
            name="adamw",
            learning_rate=5e-4,
            b2=0.98,
            schedule="cosine",
            warmup_steps=WARMUP_EPOCHS * IMAGES // ROWS,
            final_fraction=0.02,  # DeiT's 1e-5
            weight_decay=0.05,
        ),
        training=config.TrainingConfig(steps=EPOCHS * IMAGES // ROWS),
    )
