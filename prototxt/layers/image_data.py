"""ImageData: image files named in a list."""

from __future__ import annotations

from prototxt.data.config import ImageConfig, ReaderConfig
from prototxt.layers.read_ahead import no_bottoms, read_ahead, required, sharing
from prototxt.layers.transform_param import transform_of, warn_of_moved
from prototxt.registry import Built, LayerSpec, Shape, layer


@layer("ImageData")
def image_data(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """Images of a list, in order or shuffled at each pass, for ever; line i goes to worker i mod world.

    top 0 (batch, channels, height, width) after transform_param, by the first image of each batch;
          channels are blue, green, red, or gray with is_color: false
    top 1 (batch,) labels
    """
    no_bottoms(spec, bottoms)
    if len(spec.top) != 2:
        raise spec.error(f"ImageData has 2 tops (data and label), {len(spec.top)} given")
    p = spec.image_data_param
    if bool(p.new_height) != bool(p.new_width):
        raise spec.error("new_height and new_width must be set both or neither")
    warn_of_moved(spec, "image_data_param")
    transform, mean_image = transform_of(spec)
    config = ReaderConfig(
        "images",
        required(spec, "image_data_param", "source"),
        required(spec, "image_data_param", "batch_size"),
        tuple(spec.top),
        shuffle=p.shuffle,
        transform=transform,
        images=ImageConfig(p.root_folder, p.new_height, p.new_width, p.is_color, p.rand_skip),
        **sharing(spec),
    )
    return read_ahead(spec, config, mean_image)
