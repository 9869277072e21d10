#include "weightsync/heads.hpp"

#include <pybind11/stl.h>

#include <array>

#include "bindings.hpp"

namespace py = pybind11;

namespace weightsync::bindings {

void bind_heads(py::module_& module) {
    module.def(
        "rotate_rows",
        [](int dtype, float eps, const std::array<std::int64_t, 6>& sizes,
           const std::array<std::uintptr_t, 6>& pointers, int num_threads) {
            check_num_threads(num_threads);
            if (pointers[0] == 0 || pointers[3] == 0 || pointers[4] == 0 || pointers[5] == 0) {
                throw std::invalid_argument("rotated rows: a pointer is null");
            }
            const RotatedRows rows{static_cast<FloatType>(dtype),
                                   sizes[0],
                                   sizes[1],
                                   sizes[2],
                                   sizes[3],
                                   sizes[4],
                                   sizes[5],
                                   eps,
                                   pointer<void>(pointers[0]),
                                   pointer<const void>(pointers[1]),
                                   pointer<const void>(pointers[2]),
                                   pointer<const void>(pointers[3]),
                                   pointer<const void>(pointers[4]),
                                   pointer<const std::int64_t>(pointers[5])};
            const py::gil_scoped_release released;
            rotate_rows(rows, num_threads);
        },
        py::arg("dtype"), py::arg("eps"), py::arg("sizes"), py::arg("pointers"),
        py::arg("num_threads"));
}

}  // namespace weightsync::bindings
