// Which plan of the sm90 kernel serves the forward pass of training, where it takes statistics on the way.
#pragma once

#include <optional>

#include "device/tile_menu.h"

namespace yolo12_fastconv {

// None where another kernel serves the convolution, or the blocks of a cluster share a tile: few tiles, of which statistics
// are cheap. YOLO12_FASTCONV_KERNEL may name another plan that has such a kernel.
std::optional<Sm90Plan> choose_stats_plan(const MenuQuery& query);

}  // namespace yolo12_fastconv
