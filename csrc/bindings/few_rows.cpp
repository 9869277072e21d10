#include "weightsync/few_rows.hpp"

#include <pybind11/stl.h>

#include "bindings.hpp"

namespace py = pybind11;

namespace weightsync::bindings {
namespace {

FewRowsProduct product_of(bool is_gated, const Numbers<4>& sizes, const Addresses<3>& pointers) {
    return {sizes[0],
            sizes[1],
            sizes[2],
            sizes[3],
            is_gated,
            pointer<const void>(pointers[0]),
            pointer<const void>(pointers[1]),
            pointer<void>(pointers[2])};
}

}  // namespace

void bind_few_rows(py::module_& module) {
    module.attr("MOST_FEW_ROWS") = kMostFewRows;
    module.def(
        "cuda_few_rows_product",
        [](bool is_gated, const Numbers<4>& sizes, const Addresses<3>& pointers,
           std::uintptr_t stream, int device) {
            const FewRowsProduct product = product_of(is_gated, sizes, pointers);
            const py::gil_scoped_release released;
            cuda_few_rows_product(product, stream, device);
        },
        py::arg("is_gated"), py::arg("sizes"), py::arg("pointers"), py::arg("stream"),
        py::arg("device"));
    module.def(
        "cuda_takes_few_rows",
        [](bool is_gated, const Numbers<4>& sizes, int device) {
            return cuda_takes_few_rows(product_of(is_gated, sizes, {}), device);
        },
        py::arg("is_gated"), py::arg("sizes"), py::arg("device"));
    // For tests: blocks, warps, stages, bytes of shared memory.
    module.def(
        "few_rows_shape",
        [](bool is_gated, const Numbers<4>& sizes, int num_multiprocessors,
           std::int64_t most_shared_bytes) {
            const FewRowsShape shape = few_rows_shape(product_of(is_gated, sizes, {}),
                                                      num_multiprocessors, most_shared_bytes);
            return py::make_tuple(shape.num_blocks, shape.num_warps, shape.num_stages,
                                  shape.shared_bytes);
        },
        py::arg("is_gated"), py::arg("sizes"), py::arg("num_multiprocessors"),
        py::arg("most_shared_bytes"));
}

}  // namespace weightsync::bindings
