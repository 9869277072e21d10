// Threads for one call: work split by cost, first error rethrown.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

namespace weightsync {

inline constexpr int kMaxThreads = 256;

// Runs `work()` on `num_threads` threads, the caller's among them, and waits. Threads live for one
// call: starting one costs some 20 us, and no pool has to survive a fork. A system that refuses
// more threads gets the work done by those it granted, so `work` must take its share dynamically.
template <typename Work>
void run_on_threads(int num_threads, const Work& work) {
    std::exception_ptr first_error;
    std::atomic<bool> has_error{false};
    const auto guarded = [&] {
        try {
            work();
        } catch (...) {
            if (!has_error.exchange(true)) first_error = std::current_exception();
        }
    };
    std::vector<std::thread> threads;
    threads.reserve(static_cast<std::size_t>(std::max(num_threads, 1)));
    try {
        for (int i = 1; i < num_threads; ++i) threads.emplace_back(guarded);
    } catch (const std::system_error&) {
    }
    guarded();
    for (std::thread& thread : threads) thread.join();
    if (first_error) std::rethrow_exception(first_error);
}

// Many items laid end to end on one axis of cost, cut into equal ranges that threads take in turn.
class WorkAxis {
  public:
    // `cost(i)` >= 0 for each item.
    template <typename Cost>
    WorkAxis(std::int64_t num_items, const Cost& cost)
        : starts_(static_cast<std::size_t>(num_items) + 1) {
        std::int64_t total = 0;
        for (std::int64_t i = 0; i < num_items; ++i) {
            starts_[static_cast<std::size_t>(i)] = total;
            total += cost(i);
        }
        starts_.back() = total;
    }

    std::int64_t total() const { return starts_.back(); }
    std::int64_t cost(std::int64_t item) const {
        const auto i = static_cast<std::size_t>(item);
        return starts_[i + 1] - starts_[i];
    }

    // Calls `piece(item, begin, end)` for each item's part of [begin, end), item-relative.
    template <typename Piece>
    void for_range(std::int64_t begin, std::int64_t end, const Piece& piece) const {
        auto after = std::upper_bound(starts_.begin(), starts_.end(), begin);
        auto item = static_cast<std::size_t>(after - starts_.begin()) - 1;
        while (begin < end) {
            const std::int64_t stop = std::min(end, starts_[item + 1]);
            if (stop > begin) {
                piece(static_cast<std::int64_t>(item), begin - starts_[item], stop - starts_[item]);
            }
            begin = std::max(begin, stop);
            ++item;
        }
    }

    // Gives each thread the next `grain` of the axis until none is left or `work(begin, end)`
    // returns false. An error in one thread stops the others at their next grain.
    template <typename Work>
    void run(int num_threads, std::int64_t grain, const Work& work) const {
        const std::int64_t num_grains = (total() + grain - 1) / grain;
        const auto useful = static_cast<int>(
            std::min<std::int64_t>({num_threads, num_grains, std::int64_t{kMaxThreads}}));
        std::atomic<std::int64_t> next{0};
        run_on_threads(useful, [&] {
            try {
                for (;;) {
                    const std::int64_t begin = next.fetch_add(grain);
                    if (begin >= total()) return;
                    if (!work(begin, std::min(begin + grain, total()))) break;
                }
            } catch (...) {
                next.store(total());
                throw;
            }
            next.store(total());
        });
    }

  private:
    std::vector<std::int64_t> starts_;
};

// Calls `work(i)` for i < count on threads that take the next few in turn.
template <typename Work>
void for_all(std::int64_t count, int num_threads, const Work& work) {
    constexpr std::int64_t grain = 8;
    std::atomic<std::int64_t> next{0};
    const auto useful =
        static_cast<int>(std::min<std::int64_t>({num_threads, count / grain + 1, kMaxThreads}));
    run_on_threads(useful, [&] {
        for (;;) {
            const std::int64_t begin = next.fetch_add(grain);
            if (begin >= count) return;
            for (std::int64_t i = begin; i < std::min(begin + grain, count); ++i) work(i);
        }
    });
}

}  // namespace weightsync
