"""WindowData: windows of images with and without an object, as R-CNN trains on."""

from __future__ import annotations

from dataclasses import replace

from prototxt.data.config import ReaderConfig, WindowConfig
from prototxt.layers.read_ahead import no_bottoms, read_ahead, required, sharing
from prototxt.layers.transform_param import transform_of, warn_of_moved
from prototxt.registry import Built, LayerSpec, Shape, layer


@layer("WindowData")
def window_data(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """Windows drawn by chance, fg_fraction of each batch with an object, warped to crop_size.

    top 0 (batch, 3, crop_size, crop_size), channels blue, green, red; 0 outside the image
    top 1 (batch,) labels, 0 for background

    Each worker draws by its own chance from all windows. window_data_param.scale counts, not
    transform_param's, as in the original.
    """
    no_bottoms(spec, bottoms)
    if len(spec.top) != 2:
        raise spec.error(f"WindowData has 2 tops (data and label), {len(spec.top)} given")
    p = spec.window_data_param
    warn_of_moved(spec, "window_data_param", ("mean_file", "crop_size", "mirror"))
    transform, mean_image = transform_of(spec)
    if not transform.crop:
        raise spec.error("transform_param.crop_size must be set and above 0")
    if p.crop_mode not in ("warp", "square"):
        raise spec.error(f"crop_mode is warp or square, not {p.crop_mode!r}")
    if 2 * p.context_pad >= transform.crop:
        raise spec.error(f"context_pad {p.context_pad} must be below half of crop_size {transform.crop}")
    if not 0 <= p.fg_fraction <= 1:
        raise spec.error(f"fg_fraction must lie between 0 and 1, not {p.fg_fraction:g}")
    if len(transform.mean_values) not in (0, 1, 3):
        raise spec.error(f"{len(transform.mean_values)} mean_values; 1 or 3 are allowed")
    windows = WindowConfig(
        p.root_folder, p.fg_threshold, p.bg_threshold, p.fg_fraction, p.context_pad,
        p.crop_mode == "square", p.cache_images,
    )  # fmt: skip
    config = ReaderConfig(
        "windows",
        required(spec, "window_data_param", "source"),
        required(spec, "window_data_param", "batch_size"),
        tuple(spec.top),
        transform=replace(transform, scale=p.scale),
        windows=windows,
        **sharing(spec),
    )
    return read_ahead(spec, config, mean_image)
