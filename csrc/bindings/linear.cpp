#include "weightsync/linear.hpp"

#include <pybind11/stl.h>

#include <array>

#include "bindings.hpp"

namespace py = pybind11;

namespace weightsync::bindings {

void bind_linear(py::module_& module) {
    module.def(
        "multiply_rows",
        [](int dtype, const std::array<std::int64_t, 4>& sizes,
           const std::array<std::uintptr_t, 4>& pointers, int num_threads) {
            check_num_threads(num_threads);
            if (pointers[0] == 0 || pointers[1] == 0 || pointers[3] == 0) {
                throw std::invalid_argument("product of rows: a pointer is null");
            }
            LinearProduct product{};
            product.dtype = static_cast<FloatType>(dtype);
            product.num_rows = sizes[0];
            product.num_inputs = sizes[1];
            product.num_outputs = sizes[2];
            product.states_stride = sizes[3];
            product.states = pointer<const void>(pointers[0]);
            product.weight = pointer<const void>(pointers[1]);
            product.bias = pointer<const void>(pointers[2]);
            product.output = pointer<void>(pointers[3]);
            const py::gil_scoped_release released;
            multiply_rows(product, num_threads);
        },
        py::arg("dtype"), py::arg("sizes"), py::arg("pointers"), py::arg("num_threads"));
}

}  // namespace weightsync::bindings
