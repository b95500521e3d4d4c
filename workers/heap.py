"""The k largest of many, as a min-heap in an array, for compiled code."""

from workers.compiled import compiled

__all__ = ["push"]


@compiled(inline="always")
def push(heap, value):
    """Replaces the smallest of a min-heap by a larger value; places that hold -1 lie behind the heap's
    end."""
    size = heap.shape[0]
    while size > 0 and heap[size - 1] < 0:
        size -= 1
    if size == 0 or value <= heap[0]:
        return
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= value:
            break
        heap[place] = heap[child]
        place = child
    heap[place] = value
