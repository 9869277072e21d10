#include "weightsync/expert_rows.hpp"

#include <pybind11/stl.h>

#include <tuple>
#include <vector>

#include "bindings.hpp"

namespace py = pybind11;

namespace weightsync::bindings {
namespace {

using Tile = std::tuple<std::int32_t, std::int32_t, std::int32_t, std::int32_t>;

const TileShape& shape_at(int shape) {
    if (shape < 1 || shape > kNumTileShapes) throw std::invalid_argument("no such tile shape");
    return kTileShapes[shape - 1];
}

// The tiles of a launch as its blocks find them, for tests: expert, column, first row, rows.
std::vector<Tile> grouped_tiles(const std::vector<std::int32_t>& offsets, std::int64_t weight_rows,
                                int shape) {
    const TileShape& tile = shape_at(shape);
    std::vector<std::int32_t> first_tiles{0};
    std::vector<std::int32_t> starts{0};
    for (const std::int32_t end : offsets) {
        const std::int32_t tiles = (end - starts.back() + tile.rows - 1) / tile.rows;
        first_tiles.push_back(first_tiles.back() + tiles);
        starts.push_back(end);
    }
    const std::int32_t num_columns = columns_of(weight_rows, tile.weight_rows);
    std::vector<Tile> tiles;
    for (std::int32_t i = 0; i < first_tiles.back() * num_columns; ++i) {
        const ExpertTile found =
            expert_tile(first_tiles.data(), starts.data(),
                        static_cast<std::int32_t>(offsets.size()), num_columns, tile.rows, i);
        tiles.emplace_back(found.expert, found.column, found.first_row, found.num_rows);
    }
    return tiles;
}

// For tests: where in its share of gate (or of up) each row of a tile's weights is.
std::vector<std::pair<std::int32_t, bool>> tile_weights(int shape, bool is_gated) {
    std::vector<std::pair<std::int32_t, bool>> found;
    for (std::int32_t local = 0; local < shape_at(shape).weight_rows; ++local) {
        found.emplace_back(weight_within(local, is_gated), is_of_up(local, is_gated));
    }
    return found;
}

void bind_grouped(py::module_& module) {
    module.attr("MAX_EXPERTS") = kMaxExperts;
    module.attr("MAX_PICKS") = kMaxPicks;
    module.attr("NUM_TILE_SHAPES") = kNumTileShapes;
    module.def(
        "cuda_grouped_product",
        [](bool is_gated, const Numbers<6>& sizes, const Addresses<5>& pointers,
           std::uintptr_t stream, int device) {
            const GroupedProduct product{sizes[0],
                                         sizes[1],
                                         sizes[2],
                                         sizes[3],
                                         sizes[4],
                                         sizes[5],
                                         is_gated,
                                         pointer<const void>(pointers[0]),
                                         pointer<const std::int32_t>(pointers[1]),
                                         pointer<const void>(pointers[2]),
                                         pointer<const std::int32_t>(pointers[3]),
                                         pointer<void>(pointers[4])};
            const py::gil_scoped_release released;
            cuda_grouped_product(product, stream, device);
        },
        py::arg("is_gated"), py::arg("sizes"), py::arg("pointers"), py::arg("stream"),
        py::arg("device"));
    module.def("grouped_tiles", &grouped_tiles, py::arg("offsets"), py::arg("weight_rows"),
               py::arg("shape"));
    module.def("tile_weights", &tile_weights, py::arg("shape"), py::arg("is_gated"));
    module.def(
        "tile_shape_for",
        [](std::int64_t num_rows, std::int64_t num_experts) {
            return shape_for(num_rows, num_experts) + 1;
        },
        py::arg("num_rows"), py::arg("num_experts"));
}

void bind_rows(py::module_& module) {
    module.def(
        "cuda_route_rows",
        [](bool is_normalised, const Numbers<3>& sizes, const Addresses<3>& pointers,
           std::uintptr_t stream, int device) {
            const RoutedRows rows{sizes[0],
                                  sizes[1],
                                  sizes[2],
                                  is_normalised,
                                  pointer<const void>(pointers[0]),
                                  pointer<std::int32_t>(pointers[1]),
                                  pointer<void>(pointers[2])};
            const py::gil_scoped_release released;
            cuda_route_rows(rows, stream, device);
        },
        py::arg("is_normalised"), py::arg("sizes"), py::arg("pointers"), py::arg("stream"),
        py::arg("device"));
    module.def(
        "cuda_sort_picks",
        [](const Numbers<4>& sizes, const Addresses<4>& pointers, std::uintptr_t stream,
           int device) {
            const SortedPicks picks{sizes[0],
                                    sizes[1],
                                    sizes[2],
                                    sizes[3],
                                    pointer<const std::int32_t>(pointers[0]),
                                    pointer<std::int32_t>(pointers[1]),
                                    pointer<std::int32_t>(pointers[2]),
                                    pointer<std::int32_t>(pointers[3])};
            const py::gil_scoped_release released;
            cuda_sort_picks(picks, stream, device);
        },
        py::arg("sizes"), py::arg("pointers"), py::arg("stream"), py::arg("device"));
    module.def(
        "cuda_combine_rows",
        [](const Numbers<3>& sizes, const Addresses<4>& pointers, std::uintptr_t stream,
           int device) {
            const CombinedRows rows{sizes[0],
                                    sizes[1],
                                    sizes[2],
                                    pointer<const void>(pointers[0]),
                                    pointer<const void>(pointers[1]),
                                    pointer<const std::int32_t>(pointers[2]),
                                    pointer<void>(pointers[3])};
            const py::gil_scoped_release released;
            cuda_combine_rows(rows, stream, device);
        },
        py::arg("sizes"), py::arg("pointers"), py::arg("stream"), py::arg("device"));
}

}  // namespace

void bind_experts(py::module_& module) {
    bind_grouped(module);
    bind_rows(module);
}

}  // namespace weightsync::bindings
