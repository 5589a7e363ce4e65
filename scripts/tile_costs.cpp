// The menu's estimates for scripts/tune.py, which compiles this with csrc/host/tile_costs.cpp and sm90_plan.cpp into a
// library of its own: many at once, with constants of the caller's.
#include "device/tile_costs.h"
#include "device/gemm_tiles.h"

#include <iterator>

using namespace yolo12_fastconv;

struct Query {
  ConvShape shape;
  int element;  // bytes of x, weights and y
  int tile;  // of kGemmTiles; -1: a plan of the sm90 kernel, -2: of that for small grids
  int pixels, channels, depth, mode, resident, split, pixel_stages, weight_stages;  // as in its name
};

// costs: their number, then the members of TileCosts. Returns 1 if they are not as many, 2 for a plan that the layer does
// not have.
extern "C" int tile_costs(const double* costs, int count, const Query* queries, double* cycles) {
  TileCosts given;
  if (sizeof given != sizeof(double) * static_cast<size_t>(costs[0])) return 1;
  std::copy_n(costs + 1, static_cast<size_t>(costs[0]), reinterpret_cast<double*>(&given));
  for (int i = 0; i < count; ++i) {
    const Query& q = queries[i];
    if (q.tile >= 0) {
      cycles[i] = gemm_cycles(q.shape, q.element == 4 ? DType::kFloat32 : DType::kFloat16, kGemmTiles[q.tile], given);
      continue;
    }
    if (q.tile == -2) {
      cycles[i] = sm90_once_cycles(q.shape, {q.channels, q.pixels / 64, q.depth * 2}, given);
      continue;
    }
    Sm90Plan plan;
    plan.element_bytes = q.element;
    plan.channels = q.channels;
    plan.workers = q.pixels / 64;
    plan.row_bytes = sm90_row_bytes(q.shape, plan.element_bytes);
    plan.parts = q.depth * plan.element_bytes / plan.row_bytes;
    if (plan.parts < 1) return 2;
    plan.mode = static_cast<PixelMode>(q.mode);
    plan.resident = q.resident;
    plan.split = q.split;
    plan.pixel_stages = q.pixel_stages;
    plan.weight_stages = q.weight_stages;
    cycles[i] = sm90_cycles(q.shape, plan, given);
  }
  return 0;
}
