import base64
import io

import numpy as np
from PIL import Image

from mmray.data.images.transform import thumbnail


def test_thumbnail_is_small_and_never_enlarged():
    def side(width, height):
        data = thumbnail(np.zeros((height, width, 3), np.uint8)).partition(",")[2]
        return Image.open(io.BytesIO(base64.b64decode(data))).size

    assert side(1000, 500) == (128, 64) and side(20, 10) == (20, 10)
